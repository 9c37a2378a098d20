"""From files of labelled structures to batches of graphs."""
