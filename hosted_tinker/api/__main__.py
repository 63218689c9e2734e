"""`python -m hosted_tinker.api`: the same as `hosted-tinker serve`."""

import sys

from hosted_tinker.cli import main

if __name__ == "__main__":
    sys.exit(main(["serve", *sys.argv[1:]]))
