# A mail server: deliveries by several clients at once to several users, whose rights the server takes on for each mail;
# folders, flags, copies and searches; all of it killed in the middle of deliveries.
PATH=$PATH:/usr/sbin:/sbin
port() { python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
imap=$(port)
mkdir mail
for user in 0 1 2; do install -d -m 700 -o $((5100 + user)) -g $((5100 + user)) "mail/$user"; done
cat >dovecot.conf <<CONF
base_dir = $PWD/run
state_dir = $PWD/state
log_path = $PWD/log
protocols = imap lmtp
ssl = no
disable_plaintext_auth = no
mail_location = maildir:$PWD/mail/%u
first_valid_uid = 1000
passdb {
  driver = static
  args = password=secret
}
userdb {
  driver = passwd-file
  args = $PWD/users
}
service imap-login {
  inet_listener imap {
    address = 127.0.0.1
    port = $imap
  }
}
service lmtp {
  unix_listener $PWD/lmtp {
    mode = 0600
  }
}
CONF
for user in 0 1 2; do echo "$user::$((5100 + user)):$((5100 + user))::$PWD/mail/$user::"; done >users
start() {
  setsid dovecot -F -c dovecot.conf &
  server=$!
  disown "$server"
  for _ in $(seq 300); do [ -S lmtp ] && doveadm -c dovecot.conf who >/dev/null 2>&1 && return; sleep 0.1; done
  cat log >&2
  return 1
}
ended() { while kill -0 -- -"$server" 2>/dev/null; do sleep 0.05; done; }
trap 'kill -9 -- -$server 2>/dev/null || true' EXIT

cat >client.py <<'PYTHON'
import hashlib, imaplib, smtplib, sys, threading

port, sizes = int(sys.argv[1]), range(0, 20000, 400)


def text(user, name):
    return f"From: a@example.org\r\nSubject: {name}\r\n\r\n" + f"{user} {name} {'x' * 60}\r\n" * (sizes[hash_of(name) % len(sizes)] // 60)


def hash_of(name):
    return int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)


def deliver(who, names, acknowledged):
    try:
        with smtplib.LMTP(sys.argv[3]) as server:
            for name in names:
                user = str(hash_of(name) % 3)
                server.sendmail("a@example.org", [user], text(user, name))
                acknowledged.append(name)
    except (OSError, smtplib.SMTPException) as error:
        if who is not None:
            raise SystemExit(f"{who}: {error}")


def subjects(box, folder="INBOX"):
    box.select(folder)
    found = box.fetch("1:*", "(BODY.PEEK[])")[1]
    mails = [part[1].decode() for part in found if isinstance(part, tuple)]
    return {mail.split("Subject: ")[1].split("\r\n")[0]: mail for mail in mails}


def open_box(user):
    box = imaplib.IMAP4("127.0.0.1", port)
    box.login(user, "secret")
    return box


if sys.argv[2] == "serve":
    clients = [threading.Thread(target=deliver, args=(n, [f"{n}-{k}" for k in range(60)], [])) for n in range(3)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    for user in "012":
        box = open_box(user)
        found = subjects(box)
        wrong = [name for name, mail in found.items() if text(user, name) not in mail]
        print("user", user, "has", len(found), "wrong:", wrong)
        print("found", len(box.search(None, "TEXT", f'"{user} 1-"')[1][0].split()))
        box.create("kept")
        print(box.copy("1:20", "kept")[0], box.store("1:10", "+FLAGS", "\\Deleted")[0], box.expunge()[0])
        print("inbox", len(subjects(box)), "kept", len(subjects(box, "kept")))
        box.rename("kept", "kept for good")
        box.logout()
elif sys.argv[2] == "until killed":
    acknowledged = []
    clients = [threading.Thread(target=deliver, args=(None, [f"{n}-{k}" for k in range(5000)], acknowledged)) for n in (7, 8)]
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    print("\n".join(acknowledged))
else:
    there = {}
    for user in "012":
        box = open_box(user)
        there |= {name: text(user, name) in mail for name, mail in subjects(box).items()}
        box.logout()
    acknowledged = open("acknowledged").read().split()
    print("lost:", [name for name in acknowledged if name not in there], "wrong:", [name for name in there if not there[name]])
PYTHON
ask() { python3 client.py "$imap" "$1" "$PWD/lmtp"; }

start
ask serve
for user in 0 1 2; do find "mail/$user" ! -user $((5100 + user)) -o ! -group $((5100 + user)); done

# Everything is killed while mail arrives.
ask 'until killed' >acknowledged &
client=$!
for _ in $(seq 300); do [ "$(find mail/*/new -type f | wc -l)" -gt 60 ] && break; sleep 0.02; done
kill -9 -- -$server
wait "$client"
ended
# If a process was killed before it wrote its number into a lock, others wait for two minutes, as it may still be
# writing it.
find mail -name '*.lock' -empty -delete
[ -s acknowledged ] && echo 'some were acknowledged'
rm -f lmtp
start
ask after
doveadm -c dovecot.conf stop
ended
grep -E 'Error|Panic|Fatal' log | grep -v -e 'Killed with signal' -e 'Broken pipe' || true
trap - EXIT
