"""NEGATIVA_* variables by which a run's processes find each other's files.

The plugin imports this module in every pytest session, so the module imports nothing.
"""

ROUND_VARIABLE = "NEGATIVA_ROUND"
"""Names, to a program under proof, the round file, which tells it what to do."""

SESSION_VARIABLE = "NEGATIVA_SESSION"
"""Tells a session's processes of it, see ``storage.handover``."""

PAGES_RUN_VARIABLE = "NEGATIVA_PAGES_RUN"
"""Tells a process that replaced itself of its run, see ``session.page_trace``."""

OWN_VARIABLES = frozenset(
    {
        ROUND_VARIABLE,
        SESSION_VARIABLE,
        PAGES_RUN_VARIABLE,
        "NEGATIVA_CHAINED_INJECTION",
        "NEGATIVA_CUPTI",
        "NEGATIVA_FIRST_RESULT",
        "NEGATIVA_GIT",  # of the commands that install this package, in docs/
        "NEGATIVA_LEVEL",
        "NEGATIVA_PAGES_ARMED",
        "NEGATIVA_PAGES_GPU",
        "NEGATIVA_PAGES_LOGS",
        "NEGATIVA_REDIRECT_LOGS",
        "NEGATIVA_REDIRECT_TABLE",
        "NEGATIVA_ROOT",
        "NEGATIVA_RUN_ID",
        "NEGATIVA_SAMPLE",
        "NEGATIVA_SAMPLE_FILES",
        "NEGATIVA_SAMPLE_SECONDS",
        "NEGATIVA_SPARE_DIR",
        "NEGATIVA_SPARE_LOG",
        "NEGATIVA_SUPERVISE",
        "NEGATIVA_LACKS",
        "NEGATIVA_NO_OTHER_USERS",
        "NEGATIVA_OUTER_LACKS",
        "NEGATIVA_TRACE_DIR",
    }
)
"""Variables that are no options: processes of a session set them for each other, and cut
libraries read one (``spare/stub.c``)."""
