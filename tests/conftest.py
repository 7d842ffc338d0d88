import torch_ropepool  # noqa: F401  (registers the ops before any test module looks them up)
