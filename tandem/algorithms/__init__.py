"""Credit and loss as data: records, advantage functions, loss functions."""
