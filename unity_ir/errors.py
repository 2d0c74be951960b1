"""The one exception that is the user's to mend, not ours."""


class UnityError(Exception):
    """
    Bad input: `operator: rule broken; fix`, in one line.

    Tools print it and exit with code 1; everything else that is raised is a bug.
    """


class UnityReport(UnityError):
    """Several errors of one kind found at once: a line that says so, then one line each."""
