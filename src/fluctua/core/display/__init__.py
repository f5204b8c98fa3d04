"""Records for people: the same rows as text in a terminal and as HTML in a notebook."""
