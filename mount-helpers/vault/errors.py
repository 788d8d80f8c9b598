# SPDX-License-Identifier: Apache-2.0
"""What an engine can answer. Each class has a number of the protocol (wire.py) and a message that names a remedy."""
from objects import Failure


class EngineError(Failure):
    """A message for the user. It names the vault and never shows a secret. Only Unknown leaves the outcome open."""
    code = 0


class Missing(EngineError):
    """There is no object with this key."""
    code = 2


class NoVault(EngineError):
    """The place of the vault is not there: a folder, bucket or pool."""
    code = 3


class Full(EngineError):
    """No space, or a quota is used up. Nothing was made."""
    code = 4


class Refused(EngineError):
    """The engine refuses this user: credentials or permissions."""
    code = 5


class Again(EngineError):
    """It did not work this time, or its outcome is not known. Only schemes raise it: the client tries again."""
    code = 6


class TooLarge(EngineError):
    """The object is larger than the engine, or this program, takes."""
    code = 7


class Failed(EngineError):
    """Anything else; trying again does not help."""
    code = 8


class Unknown(EngineError):
    """No answer before the deadline: the engine is silent. A deed may have been done, or may be done later."""
    code = 9


class NoProgram(EngineError):
    """No program serves the scheme of this URL, or what it needs is not installed."""
    code = 10


BY_CODE = {c.code: c for c in EngineError.__subclasses__()}
