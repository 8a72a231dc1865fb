"""Prints the requirements of the project and of one extra, a line each: `requirements.py PYPROJECT EXTRA`.

The image builds install dependencies from it in a layer of their own, which a change of the sources leaves alone.
"""

import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path


def of_extra(project: Mapping[str, object], extra: str) -> list[str]:
    """The project's own requirements and the extra's, extras of the project itself resolved."""
    name, extras = project["name"], project["optional-dependencies"]
    assert isinstance(name, str)
    assert isinstance(extras, Mapping)
    own = project["dependencies"]
    assert isinstance(own, Sequence)
    found = [str(line) for line in own]
    pending = [extra]
    while pending:
        for line in extras[pending.pop()]:
            itself = re.fullmatch(rf"{re.escape(name)}\[(.+)\]", line)
            if itself:
                pending += itself[1].split(",")
            else:
                found.append(line)
    return sorted(set(found))


if __name__ == "__main__":
    content = tomllib.loads(Path(sys.argv[1]).read_text())
    print("\n".join(of_extra(content["project"], sys.argv[2])))
