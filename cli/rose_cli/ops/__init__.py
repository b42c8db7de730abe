"""Verbs for people: they read and change objects of a cluster, as ``kubectl`` does.

| verb | reads | writes |
|---|---|---|
| ``status``, ``top``, ``report`` | pools, leases, slots | nothing |
| ``explain`` | a lease or pool | an annotation: the question; the operator answers in the status |
| ``pause``, ``resume`` | a pool | its mode |
| ``drain`` | pods of a node, slots | the stop annotation of its serving pods |

- ``cluster``: connection, requests, errors a person can act on.
- ``views``: objects -> rows, pure; ``tables``: rows -> text.

All of them work as ``kubectl rose VERB`` too, with kubectl's ``-n``, ``-A``, ``--context`` and
``--kubeconfig``.
"""
