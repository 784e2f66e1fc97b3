"""GLM-5.3-Flash (``glm5_next``) for frameworks that do not know it.

Importing this package loads neither torch, transformers nor a framework: entry points do so in every worker process.
"""

__version__ = "0.1.0"
