"""Images as sequences of tokens: the data sets, and how an image becomes a sequence and back."""
