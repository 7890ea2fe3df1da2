"""What `masked_conv` and `torch_convfix.nn` compute: a masked kernel as the dense pieces of its cover."""
