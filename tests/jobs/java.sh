# A Java virtual machine: a program that is compiled and run here, with channels, mapped memory, locks, listings and
# threads. It keeps no statistics in the system's directory, and optimises less, since it is short.
export JAVA_TOOL_OPTIONS='-XX:-UsePerfData -XX:TieredStopAtLevel=1 -Xshare:auto -Xmx256m'
cat >Job.java <<'JAVA'
import java.io.*;
import java.nio.*;
import java.nio.channels.*;
import java.nio.charset.StandardCharsets;
import java.nio.file.*;
import java.nio.file.attribute.*;
import java.security.MessageDigest;
import java.util.*;
import java.util.concurrent.*;
import java.util.stream.*;
import java.util.zip.*;
import static java.nio.file.StandardOpenOption.*;

public class Job {
    interface Call { Object call() throws Exception; }

    static void say(String what, Object... words) {
        System.out.println(what + Arrays.stream(words).map(word -> " " + word).collect(Collectors.joining()));
    }

    static void tried(String what, Call call) {
        try {
            say(what, call.call());
        } catch (Exception error) {
            say(what, error.getClass().getSimpleName());
        }
    }

    static String digest(Path path) throws Exception {
        byte[] digest = MessageDigest.getInstance("SHA-256").digest(Files.readAllBytes(path));
        return HexFormat.of().formatHex(digest, 0, 8);
    }

    static void files() throws Exception {
        Path base = Files.createDirectories(Path.of("files/a/b"));
        Path file = Files.writeString(base.resolve("text"), "one\ntwo\nthree\n");
        Files.write(file, List.of("four"), APPEND);
        say("files", Files.readAllLines(file), Files.size(file));
        try (Stream<String> lines = Files.lines(file)) { say("files", lines.mapToInt(String::length).sum()); }
        try (BufferedWriter writer = Files.newBufferedWriter(base.resolve("written"))) {
            for (int n = 0; n < 5000; n++) writer.write(n + "\n");
        }
        say("files", digest(base.resolve("written")));
        Files.copy(file, base.resolve("copy"), StandardCopyOption.COPY_ATTRIBUTES);
        Files.move(base.resolve("copy"), base.resolve("moved"), StandardCopyOption.ATOMIC_MOVE);
        Files.createSymbolicLink(base.resolve("link"), Path.of("text"));
        Files.createLink(base.resolve("hard"), file);
        say("files", Files.readSymbolicLink(base.resolve("link")), Files.getAttribute(file, "unix:nlink"),
            Files.isSameFile(file, base.resolve("hard")), base.resolve("link").toRealPath().getFileName());
        Files.setPosixFilePermissions(file, PosixFilePermissions.fromString("rw-r-----"));
        Files.setLastModifiedTime(file, FileTime.fromMillis(1234567));
        PosixFileAttributes found = Files.readAttributes(file, PosixFileAttributes.class);
        say("files", PosixFilePermissions.toString(found.permissions()), found.lastModifiedTime(), found.isRegularFile());
        tried("no file", () -> Files.readString(Path.of("none")));
        tried("not empty", () -> { Files.delete(Path.of("files")); return "deleted"; });
        tried("there already", () -> Files.createDirectory(base));
        tried("exclusive", () -> Files.newByteChannel(file, Set.of(CREATE_NEW, WRITE)));
        tried("no link", () -> Files.readSymbolicLink(file));
        Path temporary = Files.createTempFile(base, "t", ".tmp");
        say("files", PosixFilePermissions.toString(Files.getPosixFilePermissions(temporary)));
        Files.delete(temporary);
        for (int n = 0; n < 150; n++) Files.writeString(base.resolve("many-" + n), "x".repeat(n));
        try (DirectoryStream<Path> entries = Files.newDirectoryStream(base, "many-*")) {
            long sum = 0;
            for (Path entry : entries) sum += Files.size(entry);
            say("files", sum);
        }
        try (Stream<Path> walked = Files.walk(Path.of("files"))) { say("files", walked.count()); }
        Files.walkFileTree(base, new SimpleFileVisitor<>() {
            @Override public FileVisitResult visitFile(Path path, BasicFileAttributes attributes) throws IOException {
                if (path.getFileName().toString().startsWith("many-")) Files.delete(path);
                return FileVisitResult.CONTINUE;
            }
        });
        say("files", new TreeSet<>(Arrays.asList(base.toFile().list())));
    }

    static void channels() throws Exception {
        Path path = Path.of("channel");
        try (FileChannel channel = FileChannel.open(path, CREATE, READ, WRITE)) {
            ByteBuffer[] parts = {ByteBuffer.wrap("gathered ".getBytes()), ByteBuffer.wrap("parts".getBytes())};
            say("channel", channel.write(parts), channel.position(), channel.size());
            channel.write(ByteBuffer.wrap("GATHER".getBytes()), 0);
            ByteBuffer direct = ByteBuffer.allocateDirect(64);
            say("channel", channel.read(direct, 0), StandardCharsets.US_ASCII.decode(direct.flip()));
            channel.truncate(9).position(1 << 20);
            channel.write(ByteBuffer.wrap(new byte[] {1}));
            channel.force(true);
            say("channel", channel.size());
            try (FileChannel other = FileChannel.open(Path.of("transferred"), CREATE, WRITE)) {
                say("channel", channel.transferTo(0, channel.size(), other), other.transferFrom(channel.position(0), other.size(), 100));
            }
            // What is mapped and what is written show in each other.
            MappedByteBuffer memory = channel.map(FileChannel.MapMode.READ_WRITE, 0, 8192);
            memory.put(100, (byte) 'm').put(4096, (byte) 'n');
            memory.force();
            ByteBuffer one = ByteBuffer.allocate(1);
            channel.read(one, 4096);
            channel.write(ByteBuffer.wrap("w".getBytes()), 200);
            say("mapped", (char) one.get(0), (char) memory.get(200), (char) memory.get(100));
            MappedByteBuffer apart = channel.map(FileChannel.MapMode.PRIVATE, 0, 4096);
            apart.put(0, (byte) 'p');
            say("mapped", (char) memory.get(0), (char) apart.get(0));
            MappedByteBuffer read = channel.map(FileChannel.MapMode.READ_ONLY, 0, channel.size());
            say("mapped", read.get(1 << 20), read.capacity());
        }
        try (RandomAccessFile file = new RandomAccessFile("random", "rwd")) {
            ByteBuffer numbers = ByteBuffer.allocate(200);
            for (int n = 0; n < 40; n++) { file.seek(n * 200L); for (int m = 0; m < 25; m++) numbers.putLong(m * 8, (n * 25 + m) * 3L); file.write(numbers.array()); }
            long sum = 0;
            for (int n = 999; n >= 0; n -= 7) { file.seek(n * 8L); sum += file.readLong(); }
            file.setLength(4000);
            say("random", sum, file.length(), file.getFilePointer());
            tried("the end", () -> { file.seek(3999); return file.readLong(); });
        }
        try (AsynchronousFileChannel channel = AsynchronousFileChannel.open(Path.of("asynchronous"), CREATE, READ, WRITE)) {
            List<Future<Integer>> written = new ArrayList<>();
            for (int n = 0; n < 50; n++) written.add(channel.write(ByteBuffer.wrap(new byte[100]), n * 100L));
            int sum = 0;
            for (Future<Integer> each : written) sum += each.get();
            say("asynchronous", sum, channel.size());
        }
    }

    static void locks() throws Exception {
        Path path = Path.of("locked");
        try (FileChannel channel = FileChannel.open(path, CREATE, READ, WRITE); FileChannel again = FileChannel.open(path, WRITE)) {
            FileLock lock = channel.lock(0, 10, false);
            say("lock", lock.isValid(), lock.isShared());
            tried("lock twice", () -> again.tryLock(5, 10, false));
            FileLock beside = again.tryLock(10, 10, false);
            say("lock", beside != null);
            // Somebody else finds the first one in the way, and not what is free.
            Process other = new ProcessBuilder("python3", "-c", "import fcntl, sys\n"
                + "file = open('locked', 'r+b')\n"
                + "for start in (0, 10, 20):\n"
                + "    try: fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 10, start); print(start, 'free')\n"
                + "    except OSError: print(start, 'taken')\n").redirectErrorStream(true).start();
            say("lock", new String(other.getInputStream().readAllBytes()).replace('\n', ','), other.waitFor());
            lock.release();
            beside.release();
        }
    }

    static void threads() throws Exception {
        Path base = Files.createDirectory(Path.of("threads"));
        ExecutorService pool = Executors.newFixedThreadPool(8);
        List<Future<Long>> results = new ArrayList<>();
        for (int thread = 0; thread < 8; thread++) {
            int number = thread;
            results.add(pool.submit(() -> {
                long sum = 0;
                for (int turn = 0; turn < 40; turn++) {
                    Path path = base.resolve(number + "-" + turn);
                    Files.write(path, new byte[turn]);
                    Files.writeString(base.resolve("shared"), number + " " + turn + "\n", CREATE, APPEND);
                    sum += Files.readAllBytes(path).length;
                    if (turn % 2 == 0) Files.move(path, base.resolve("moved-" + number + "-" + turn));
                }
                return sum;
            }));
        }
        long sum = 0;
        for (Future<Long> result : results) sum += result.get();
        pool.shutdown();
        say("threads", sum, Files.readAllLines(base.resolve("shared")).stream().distinct().count(), base.toFile().list().length);
        Files.delete(base.resolve("shared"));
    }

    static void archives() throws Exception {
        try (ZipOutputStream archive = new ZipOutputStream(new FileOutputStream("all.zip"))) {
            for (int n = 0; n < 50; n++) {
                ZipEntry entry = new ZipEntry("entry-" + n);
                entry.setTime(0);
                archive.putNextEntry(entry);
                archive.write(("content " + n).repeat(n).getBytes());
            }
        }
        try (ZipFile archive = new ZipFile("all.zip")) {
            long sum = 0;
            for (ZipEntry entry : Collections.list(archive.entries())) sum += archive.getInputStream(entry).readAllBytes().length;
            say("archive", archive.size(), sum);
        }
        try (ObjectOutputStream output = new ObjectOutputStream(new FileOutputStream("object"))) {
            output.writeObject(new ArrayList<>(List.of(1, 2, 3)));
        }
        try (ObjectInputStream input = new ObjectInputStream(new FileInputStream("object"))) { say("object", input.readObject()); }
        Process child = new ProcessBuilder("sort", "-rn").redirectInput(new File("numbers")).redirectOutput(new File("sorted")).start();
        say("child", child.waitFor(), digest(Path.of("sorted")));
    }

    public static void main(String[] words) throws Exception {
        files();
        channels();
        locks();
        threads();
        Files.write(Path.of("numbers"), IntStream.range(0, 300).mapToObj(Integer::toString).toList());
        archives();
        File gone = new File("gone");
        gone.createNewFile();
        gone.deleteOnExit();
    }
}
JAVA
javac -nowarn Job.java 2>/dev/null
java -cp . Job 2>/dev/null
# The classes from an archive, which the machine maps.
printf 'Main-Class: Job\n' >manifest.txt
jar cfm job.jar manifest.txt *.class 2>/dev/null
mkdir packed && cd packed && java -jar ../job.jar 2>/dev/null | sha256sum && cd ..
rm -f ./*.jar ./*.class packed/*.zip all.zip
manifest .
