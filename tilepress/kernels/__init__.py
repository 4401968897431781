"""One op per file, its PyTorch reference beside it. Ops are registered with torch.library under `tilepress::`.

A CUDA source is named after the oldest card that it runs on, then after its op: `sm90_*.cu` needs Hopper's own instructions and runs on
sm_90 alone, `sm80_*.cu` runs on every card from sm_80 on. arch.py lists them and says which one serves an op on a card; `.cuh` files hold what
several sources share.
"""

import torch

library = torch.library.Library("tilepress", "DEF")
