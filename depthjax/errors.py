"""The one exception that means: the input is wrong, and here is what would be right."""


class InputError(ValueError):
    """Bad input. The message is one sentence: field or file, its value, and the remedy.

    The command line prints it without a traceback and exits with status 2.
    """
