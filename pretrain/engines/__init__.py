"""Forward, backward and update: plain torch, and DeepSpeed ZeRO 0 to 3."""
