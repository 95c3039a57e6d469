"""The program that unpacks an archive. It runs inside the sandbox, like any other there."""

UNPACK = """
import gzip, os, shutil, sys, tarfile, zipfile

archive, target = sys.argv[1:]
if not os.path.isfile(archive):
    sys.exit("File not found: " + archive)
target = target or os.path.dirname(os.path.abspath(archive))
os.makedirs(target, exist_ok=True)
if zipfile.is_zipfile(archive):
    with zipfile.ZipFile(archive) as content:
        content.extractall(target)
        names = content.namelist()
elif tarfile.is_tarfile(archive):
    with tarfile.open(archive) as content:
        names = content.getnames()
        if hasattr(tarfile, "data_filter"):
            content.extractall(target, filter="data")
        else:
            content.extractall(target)
elif archive.endswith(".gz"):
    name = os.path.basename(archive)[:-3]
    with gzip.open(archive) as source, open(os.path.join(target, name), "wb") as copy:
        shutil.copyfileobj(source, copy)
    names = [name]
else:
    sys.exit("Not an archive: " + archive + " (known are zip, tar, tar.gz, tar.bz2 and gz)")
print("Unpacked %d entries to %s" % (len(names), target))
"""
