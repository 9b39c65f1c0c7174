"""A test that a layer reaches only the layers below it."""

def layer_test(name, targets, may_reach):
    """Fails if one of `targets` depends, however indirectly, on anything outside `may_reach`.

    Args:
      name: the test.
      targets: the public targets of a layer.
      may_reach: packages, each with all below it, and external repositories: ["//mesh", "@absl"].
    """
    reached = "deps(set(%s))" % " ".join(targets)
    allowed = "^(%s)" % "|".join(["%s[:/]" % place for place in may_reach])
    native.genquery(
        name = name + "_forbidden",
        expression = "{reached} except filter(\"{allowed}\", {reached})".format(reached = reached, allowed = allowed),
        # Not what the compiler itself is made of.
        opts = [
            "--noimplicit_deps",
            "--notool_deps",
        ],
        scope = targets,
        testonly = True,
    )
    native.sh_test(
        name = name,
        size = "small",
        srcs = ["layer_test.sh"],
        args = ["$(rootpath :%s_forbidden)" % name] + targets,
        data = [":%s_forbidden" % name],
    )
