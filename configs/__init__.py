"""Run configuration: one YAML file drives every stage.

`load(cls, path, overrides)` reads YAML into dataclasses and refuses what it does not know. `load_run` does it for
a whole run. This package is the leftmost of the house: it imports no other part and stays free of torch, so that
`headwright --help` answers at once.
"""

from headwright.configs.errors import UserError, reason
from headwright.configs.load import dump, load, load_run
from headwright.configs.schema import RunConfig

__all__ = ["RunConfig", "UserError", "dump", "load", "load_run", "reason"]
