"""Images as tokens: which data sets there are, how an image becomes a sequence, what comes when."""
