"""A GPU's behavior where it differs from a CPU's, without one.

`accelerator.py`: what DeepSpeed asks of its accelerator, counted. `devices.py`: torch.cuda with a
number of devices, tensors on them and the failures of first launches, also in ranks of other
processes (GPU_STUBS).
"""
