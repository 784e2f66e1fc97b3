"""The checkpoint on disk: which tensors it holds, reading, writing, and small synthetic ones."""
