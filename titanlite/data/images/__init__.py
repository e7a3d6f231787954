"""Image data sets, and the conversion between images and sequences of tokens."""
