"""The mathematics of training, as pure functions of tensors; losses take global denominators and return (loss, stats)."""
