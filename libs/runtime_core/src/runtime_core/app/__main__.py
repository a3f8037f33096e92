"""Check an app: `python -m runtime_core.app desk:app` exits with status 1 and one line if it cannot be imported."""

import sys

from runtime_core.app.loading import load_app
from runtime_core.errors import ConfigurationError

if __name__ == "__main__":
    try:
        load_app(sys.argv[1])
    except ConfigurationError as error:
        sys.exit(str(error))
