"""Training data: the data sets by name, and the order in which their samples are read."""
