"""CPU kernels in C, built at first use."""
