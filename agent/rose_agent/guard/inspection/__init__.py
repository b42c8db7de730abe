"""For people: the pages of a running guard, and the verbs that read them."""
