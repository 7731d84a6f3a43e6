"""`python -m meshwright COMMAND`: the same as the `meshwright` command."""

from meshwright.cli.main import main

if __name__ == "__main__":
    main()
