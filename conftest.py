pytest_plugins = [
    "pytester",
    "tests.support.faults",
    "tests.support.projects",
    "tests.support.made_site",
]
