"""Figures that tell a healthy training set-up from a broken one, their ranges, and the report.

* :mod:`.metrics`: each metric, its healthy range and what to suspect outside it;
* :mod:`.logprobs`: how trainer and rollout log-probabilities are compared;
* :mod:`.verdict`: rows of metrics to findings;
* :mod:`.report`: rows and findings to one HTML page.
"""
