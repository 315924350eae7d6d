"""The mathematics of training: pure functions of tensors. Sums and global denominators come in, (loss, stats) go out."""
