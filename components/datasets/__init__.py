"""Datasets: the only list. A new dataset is a file beside the others and a line here."""
