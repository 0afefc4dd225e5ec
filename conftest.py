pytest_plugins = ["pytester", "tests.support.projects", "tests.support.made_site"]
