"""Shell of the simulator: reads scenarios and traces, runs them, writes results.

- ``main``: the verb ``rose simulate``. ``reading``: YAML and CSV, with file, line and field.
- ``study``: regimes, seeds and derates of one scenario; the tables.
"""
