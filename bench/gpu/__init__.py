"""``python -m bench.gpu``: what a GPU does when two decode loops share it.

Needs torch and nvidia-ml-py and nothing of SGLang, so that it runs where no engine can be carried.
Without a GPU the same checks run on the stand-ins of the device drivers, to try what reads and
reports; its figures then mean nothing and are not kept.
"""
