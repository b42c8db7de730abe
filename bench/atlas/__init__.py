"""Exactness atlas: which architectures of SGLang keep nothing old after a commit in place."""
