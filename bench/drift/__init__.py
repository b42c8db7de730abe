"""``python -m bench.drift``: how far engines answer the fixed prompt from the trainer.

Ones that are right, and ones that are wrong.

Read ``trained`` (a model that has learnt something), ``answers`` (the same weights under other
arithmetic, weights or settings that went wrong, and a real SGLang).
"""
