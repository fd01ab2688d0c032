"""Questions put to the test with this package: a folder has the code, plan, rows, page and tests of one."""
