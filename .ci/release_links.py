"""Makes the links of a release absolute: a package index shows the README without its repository.

    python .ci/release_links.py https://HOST/OWNER/NAME TAG

Rewrites README.md and setup.cfg of the working directory. The checkout itself has relative links,
which hold wherever it is hosted.
"""

import pathlib
import re
import sys

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\n)*)\]\((?![a-z]+:|#)([^()\s]+)\)")


def absolute(readme, repository, tag):
    """The text of the README with its links into the checkout made absolute."""

    def link(match):
        kind = "raw" if match[1] else "blob"  # pictures are shown, pages are opened
        return f"{match[1]}[{match[2]}]({repository}/{kind}/{tag}/{match[3]})"

    return _LINK.sub(link, readme)


def with_urls(setup, repository, tag):
    """The text of setup.cfg with `project_urls` filled in."""
    urls = {
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Source": repository,
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Security": f"{repository}/blob/{tag}/SECURITY.md",
    }
    lines = "".join(f"    {name} = {url}\n" for name, url in urls.items())
    filled, count = re.subn(
        r"^project_urls =\n(?! )", f"project_urls =\n{lines}", setup, flags=re.M
    )
    if count != 1:
        raise ValueError("setup.cfg has no empty project_urls to fill in.")
    return filled


def main(repository, tag):
    """Rewrites both files."""
    for name, change in (("README.md", absolute), ("setup.cfg", with_urls)):
        path = pathlib.Path(name)
        text = change(path.read_text(encoding="utf-8"), repository.rstrip("/"), tag)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
