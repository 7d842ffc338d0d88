"""The two ways in which the emulator says no."""


class CompileError(Exception):
    """The shader is not Metal, or not what the emulator can run."""


class Fault(Exception):
    """What was run did something that Metal leaves undefined, or that torch refuses."""
