"""A test that an example workspace of its own builds and runs."""

def standalone_test(name, workspace, files, needs, repositories, command = "run", elsewhere = False):
    """Runs `bazel <command> //:<workspace>` in a workspace below this package that takes Shardweave by local_repository.

    The workspace declares only the dependencies of the component that it shows; a component that reaches
    for more fails to build there.

    Args:
      name: the test.
      workspace: its directory, which .bazelignore names; also the name of its program.
      files: the files in it.
      needs: the component's targets. The test runs again when they change.
      repositories: {repository: a file in it}. They are taken as fetched here.
      command: "run", or "analyse": everything that the program needs is found, nothing is compiled.
      elsewhere: in a copy outside of the repository.
    """
    native.sh_test(
        name = name,
        size = "medium",
        srcs = ["standalone_test.sh"],
        args = [workspace, command, "elsewhere" if elsewhere else "here"] + ["%s=$(rootpath %s)" % item for item in repositories.items()],
        data = ["//:WORKSPACE"] + ["%s/%s" % (workspace, file) for file in files] + needs + repositories.values(),
        # It runs Bazel, which reads the checkout and needs the disk cache.
        tags = ["local"],
    )
