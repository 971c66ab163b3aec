import sys

try:
    from gpubench.commands import main
except ModuleNotFoundError as error:
    if error.name != "gpubench.commands":
        raise
    print(
        "error: gpubench/commands must be a symbolic link to ../commands, and is not one in this checkout",
        file=sys.stderr,
    )
    print(
        "hint: set git config core.symlinks true and check out again, or run pip install . and then gpubench",
        file=sys.stderr,
    )
    sys.exit(2)
except KeyboardInterrupt:  # while the modules are imported
    sys.exit(130)

if __name__ == "__main__":
    main()
