"""Export: the model of a saved step in a form that other programs read."""
