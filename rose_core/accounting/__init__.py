"""What a borrowed trajectory costs: one set of formulas for operator, report and simulator.

- ``ledger``: what was used and what came out of it, in integers that add up.
- ``cost``: prices applied to a ledger; cost per accepted trajectory; break-even price.
- ``statement``: one ledger with its prices, everything a reader asks.

``docs/accounting.md`` derives every formula.
"""
