"""The one exception that is the user's to mend, not ours."""


class UnityError(Exception):
    """
    Bad input: `operator: rule broken; fix`, in one line.

    Tools print it and exit with code 1; everything else that is raised is a bug.
    """


class UnityReport(UnityError):
    """Several errors of one kind, found at once, as one text: a line that says so, then a line for each."""


EXTRAS = {"torch": "torch", "triton": "gpu", "jax": "jax"}
"""Libraries that only some work needs, each with the extra of this package that installs it (pyproject.toml)."""


def not_installed(error: ModuleNotFoundError) -> UnityError | None:
    """
    Return the `UnityError` to raise in place of `error` if the missing module is PyTorch, Triton or JAX, which only
    some work needs (`EXTRAS`): its message gives the `pip install` to run. None if another module is missing.
    """
    library = (error.name or "").partition(".")[0]
    if library not in EXTRAS:
        return None
    return UnityError(f"{library} is not installed, which this needs; pip install 'unity-ir[{EXTRAS[library]}]'")
