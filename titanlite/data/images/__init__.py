"""Image data sets, and the conversion between images and sequences of tokens.

Every data set is a function from a global sample index to a sequence of tokens. It has no read
position and does not depend on the rank, so all plans read the same data.
"""
