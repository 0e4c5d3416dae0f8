"""`index`: builds the indices of TFRecord files, or holds them against their files."""

from dp_keras_opt.data.sources import tfrecord
from dp_keras_opt_cli.models import existing
from dp_keras_opt_cli.results import CommandError, FileError, Result, errors_as


def index(arguments):
    """The `Result` of `index`."""
    done = tfrecord.check_index if arguments.check else tfrecord.index_tfrecord
    files = []
    for path in dict.fromkeys(arguments.files):
        existing(path)
        with errors_as(CommandError, of=ImportError), errors_as(FileError, of=ValueError):
            count = done(path)
        files.append({"file": path, "records": count, "index": tfrecord.index_path(path)})
    total = sum(each["records"] for each in files)
    says = "agrees" if arguments.check else "written"
    lines = [f"{each['index']}: {_records(each['records'])}, {says}" for each in files]
    if len(files) > 1:
        lines.append(f"{_records(total)} in {len(files)} files")
    return Result({"records": total, "checked": arguments.check, "files": files}, "\n".join(lines))


def _records(number):
    return f"{number:,} record" + "s" * (number != 1)
