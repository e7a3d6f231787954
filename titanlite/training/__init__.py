"""Starting values, loss, gradient norm, optimizer and step: the same numbers under every plan."""
