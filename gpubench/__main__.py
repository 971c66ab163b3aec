import sys

try:
    from gpubench.commands import main
except ModuleNotFoundError as error:
    if error.name != "gpubench.commands":
        raise
    print("error: gpubench/commands is a link to ../commands, and here it is none", file=sys.stderr)
    print("hint: check out with git config core.symlinks true, or pip install . and run gpubench", file=sys.stderr)
    sys.exit(2)

if __name__ == "__main__":
    main()
