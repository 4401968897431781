"""One op per file, its PyTorch reference beside it. Ops are registered with torch.library under `tilepress::`."""

import torch

library = torch.library.Library("tilepress", "DEF")
