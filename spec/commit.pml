/* The commit, line, collection and repair protocol of docs/protocol.md as one next-state relation for Spin.

   N ranks on N nodes, one copy of every shard on the next node (k = 1). A *place* is where a machine stands:
   0..N-1 are the positions the launcher uses; N..N+LIMBO-1 hold machines that were cut off from position
   0..LIMBO-1 with their memory and may come back. Everything about a machine moves with it.

   u = 1..U are generations and l = 1..L are launches: ghost identities, the truth. What the protocol may compare
   of them are their names: (epoch, nonce) and (epoch, nonce, step).

   Messages (acknowledgement, report, announcement) are sets that only grow. A member may be delivered never
   (lost), late, twice, or before others (reordered): all that a network can do to it.

   The line of a launch is what it loaded (from which all ancestors and their cuts follow) and the launches that it
   knows of. What it knows and does not hold is abandoned; what it does not know is another history. A line is not
   shortened here: the floor is checked by the simulator (tests/sim).

   Whoever is dead takes no step any more; whoever is paused takes it later. So nothing ends a launch: a new one
   may start at any time, and all trainers and agents of older ones stay able to wake up.

   The rules are C functions, a guard `may_x` and a step `x` each; Spin chooses among all events in all orders, one
   indivisible step after the other. Sizes are compiled in; the environment variable MUTANT names one rule to break. */
#ifndef N
#define N 2
#endif
#ifndef U
#define U 2         /* generations */
#endif
#ifndef L
#define L 2         /* launches */
#endif
#ifndef FAULTS
#define FAULTS 1    /* machines lost, machines cut off, copies gone bad */
#endif
#ifndef LIMBO
#define LIMBO 1     /* positions whose machine may be cut off and come back */
#endif
#ifndef RESTARTS
#define RESTARTS 0  /* of agents */
#endif
#ifndef ROLLBACKS
#define ROLLBACKS 0 /* load(step=N) by an operator */
#endif
#ifndef LOSS
#define LOSS 1      /* machines are lost */
#endif
#ifndef ROT
#define ROT 0       /* copies go bad and are repaired */
#endif
#ifndef HEAL
#define HEAL 0      /* whoever has a copy of what is kept gives it to others */
#endif
#ifndef STRAYS
#define STRAYS 0    /* launches on one position alone, that load there and save nothing */
#endif
#ifndef ZOMBIES
#define ZOMBIES 1   /* trainers of older launches still act */
#endif
#ifndef TIE
#define TIE 0       /* two launches that start together may read the same millisecond */
#endif
#ifndef LAG
#define LAG 0       /* a launch's clock may be behind, where one of its machines has heard of the launch before it */
#endif
#ifndef SWIFT
#define SWIFT 0     /* a launch is one event, a save is one that gets this or that far: for more launches and faults */
#endif
#define P (N+LIMBO)

/* ---- a machine, on tmpfs: survives its agent, moves with the machine */
byte have[P*N];     /* sealed, verified shards of each rank: bit u */
byte rec[P];        /* newest commit record */
byte ses[P];        /* launch that took the agent over (Begin) */
byte lines[P];      /* launches whose line lies here, without those that a newer one here knows of; bit l */
byte mem[P];        /* launches that gave it a rank: trainers run there, the others know its address; bit l */
/* ---- a machine, in its agent's memory */
byte seen[P];       /* newest launch that anybody spoke of */
byte got[2*N];      /* of position 0 and of the machine cut off from there: reports counted, by rank; bit u */
/* ---- in flight, for the members of the launch of u */
byte acks[N];       /* node r+1 → node r: rank r's shard is verified and sealed here; bit u */
byte reports[N];    /* node r → coordinator: rank r's shard has its copies; bit u */
byte announced;     /* coordinator → all: there is a record; bit u */
/* ---- what the trainers of a launch know */
byte epoch[L+1], picked[L+1], last[L+1];  /* last: its newest generation, at first the loaded one */
byte claimed[L+1];  /* bit r: rank r has put the line on its node, so it may seal */
byte knows[L+1];    /* launches that its line lists; bit l */
byte stray;         /* launches on one position alone; bit l */
byte chosen;        /* bit l: load has decided */
byte nl;            /* launches so far */
/* ---- generations */
byte step[U+1], launch[U+1], parent[U+1], sealed[U+1];
byte nu;            /* generations so far */
/* ---- the world */
byte away;          /* bit p: cut off, or nobody there */
byte faults, restarts, rollbacks, flip;  /* flip: how two nonces compare is chance */
/* ---- ghosts: no rule of the protocol reads them */
byte promised;      /* newest generation that wait("replicated") returned for, while that binds */
byte exposed;       /* faults that hit it since all its copies were there; it has to survive one */
byte hit[U+1];      /* faults that hit each generation */
byte torn[L+1];     /* faults that hit the machines of each launch */
byte rolled;        /* launch that went back on request last: what older ones did above it is given up */
byte base;          /* what it went back to: promised again once all its copies and lines are there */
byte took[P];       /* newest launch that ever took this machine over, or put its line there */
byte heard[P];      /* newest launch this machine exchanged a message with */
byte broken;        /* property that was violated */

c_code {
extern int readtrail;
#define BIT(x) (1 << (x))
#define H(p, r) now.have[(p) * N + (r)]
#define COUNTED(c, r) now.got[((c) >= N ? N : 0) + (r)]
#define SAY(...) do { if (readtrail) { printf("EV "); printf(__VA_ARGS__); printf("\n"); } } while (0)
/* Called where it must hold; the first violation ends the search. */
#define MUST(property, truth) do { if (!(truth)) { now.broken = property; SAY("BROKEN I%d", property); } } while (0)

static int mutant(const char *name)
{
	static const char *chosen_mutant;
	if (!chosen_mutant) { chosen_mutant = getenv("MUTANT"); if (!chosen_mutant) chosen_mutant = ""; }
	return strcmp(chosen_mutant, name) == 0;
}
/* strcmp in every guard would cost more than the search: each mutant is looked up once. */
#define MUTANT(name) ({ static int is_ = -1; if (is_ < 0) is_ = mutant(name); is_; })

/* -------- names, their order, lines -------- */
static int older(int a, int b)  /* of two launches; 0 = none, older than all */
{
	if (now.epoch[a] != now.epoch[b]) return now.epoch[a] < now.epoch[b];
	return a != b && (now.flip ? a > b : a < b);
}
static int later(int a, int b) { return older(a, b) ? b : a; }
static int newer(int a, int b)  /* of two generations: by step, then by launch */
{
	if (now.step[a] != now.step[b]) return now.step[a] > now.step[b];
	return older(now.launch[b], now.launch[a]);
}
static int same_name(int a, int b)
{
	if (!MUTANT("no-nonce")) return a == b;
	return now.step[a] == now.step[b] && now.epoch[now.launch[a]] == now.epoch[now.launch[b]];
}
enum { UNKNOWN = -2, NOTHING = -1, ALL = 255 };
/* Up to which step launch m is on the line of launch l. A ghost: no mutant breaks it. */
static int true_cut(int l, int m)
{
	int u;
	if (m == l) return ALL;
	if (!(now.knows[l] & BIT(m))) return UNKNOWN;
	for (u = now.picked[l]; u; u = now.parent[u]) if (now.launch[u] == m) return now.step[u];
	return NOTHING;
}
static int cut_of(int l, int m)
{
	int known = true_cut(l, m);
	if (MUTANT("no-line")) return ALL;
	if (MUTANT("line-by-epoch") && now.epoch[m] == now.epoch[l]) return ALL;
	return MUTANT("kills-the-unknown") && known == UNKNOWN && older(m, l) ? NOTHING : known;
}
static int on_line(int l, int u) { int cut = cut_of(l, now.launch[u]); return cut != UNKNOWN && now.step[u] <= cut; }
static int kills(int l, int u)
{
	int cut = l ? cut_of(l, now.launch[u]) : UNKNOWN;
	return cut != UNKNOWN && now.step[u] > cut;
}
static int dead(int l, int u)
{
	int cut = l ? true_cut(l, now.launch[u]) : UNKNOWN;
	return cut != UNKNOWN && now.step[u] > cut;
}
static int in_force(int p)  /* the newest of the lines */
{
	int l, newest = 0;
	for (l = 1; l <= now.nl; l++) if (now.lines[p] & BIT(l)) newest = later(newest, l);
	return newest;
}
static void keep_line(int p, int l)
{
	int m;
	if (MUTANT("line-overwritten")) { now.lines[p] = BIT(l); return; }
	now.lines[p] |= BIT(l);
	for (m = 1; m <= now.nl; m++) if (now.knows[in_force(p)] & BIT(m)) now.lines[p] &= ~BIT(m);
}

/* -------- what an agent knows -------- */
static int linked(int p) { return !(now.away & BIT(p)); }
static int newest_known(int p) { return later(now.ses[p], later(now.seen[p], in_force(p))); }
static int quiet(int p) { return older(now.ses[p], newest_known(p)); }
/* The machine has a rank in launch l, and its agent has begun it and heard of none newer. */
static int works_for(int p, int l)
{
	return l && (now.mem[p] & BIT(l)) && now.ses[p] == l && !quiet(p);
}
static int licence(int p)  /* the record that older generations may go for */
{
	int u = now.rec[p];
	if (!u) return 0;
	if (MUTANT("dead-record-licenses")) return u;
	if (kills(in_force(p), u)) return 0;
	return MUTANT("old-record-licenses") || now.launch[u] == now.ses[p] ? u : 0;
}
static int droppable(int p, int u)
{
	int record = licence(p), line = in_force(p), loaded = now.picked[line];
	if (kills(line, u)) return 1;
	/* A record licenses nothing against a history that its line does not know. (No mutant: here no machine of one history
	   works for another that does not know it. The simulator has one.) */
	if (record && newer(record, u)
	    && (now.launch[u] == now.launch[record] || (line && cut_of(line, now.launch[u]) != UNKNOWN))) return 1;
	return MUTANT("base-licenses") && loaded && newer(loaded, u);
}
static int acts(int l) { return ZOMBIES || l == now.nl; }

/* -------- ghosts -------- */
static int holds(int p, int u) { int r; for (r = 0; r < N; r++) if (H(p, r) & BIT(u)) return 1; return 0; }
/* A machine that was away when the job went back on request may still work for what was given up. */
static int informed(int p)
{
	return !now.rolled || !older(in_force(p), now.rolled);
}
static int full(int u)  /* each shard on two machines that can be reached, whichever they are */
{
	int p, r, copies;
	for (r = 0; r < N; r++) {
		for (copies = 0, p = 0; p < P; p++) copies += linked(p) && informed(p) && (H(p, r) & BIT(u)) != 0;
		if (copies < 2) return 0;
	}
	return 1;
}
static int stems(int child, int ancestor)
{
	while (child && child != ancestor) child = now.parent[child];
	return child == ancestor;
}
static int given_up(int u)
{
	return now.rolled && dead(now.rolled, u);
}
static void redundancy(void)
{
	int p;
	if (now.promised) { if (full(now.promised)) now.exposed = 0; return; }
	if (!now.base || !full(now.base)) return;
	for (p = 0; p < N; p++) if (in_force(p) != now.rolled) return;
	now.promised = now.base; now.exposed = 0; now.base = 0;
}
static void struck(int p)
{
	int u, l;
	now.faults++;
	for (l = 1; l <= now.nl; l++) if (now.mem[p] & BIT(l)) now.torn[l]++;
	if (now.promised && holds(p, now.promised)) now.exposed++;
	for (u = 1; u <= U; u++) if (holds(p, u) && now.hit[u] < 2) now.hit[u]++;
}
static void blank(int p)
{
	int r;
	for (r = 0; r < N; r++) { H(p, r) = 0; if (p % N == 0) COUNTED(p, r) = 0; }
	now.rec[p] = now.ses[p] = now.seen[p] = now.lines[p] = now.mem[p] = now.took[p] = now.heard[p] = 0;
}
static void take_over(int p, int l)
{
	int r;
	int restarts_count = now.ses[p] != l && p % N == 0 && !MUTANT("late-report");
	if (restarts_count) for (r = 0; r < N; r++) COUNTED(p, r) = 0;
	now.ses[p] = l; now.seen[p] = later(now.seen[p], l); now.took[p] = later(now.took[p], l);
	if (LAG && l > now.heard[p]) now.heard[p] = l;
}

/* -------- launch -------- */
/* The launcher starts trainers on the positions. They agree on an epoch above all that the agents there have seen
   (a machine that came back is asked too), and not below the clock. `slow`: the clock shows the time of the launch
   before. */
static int may_start(int slow)
{
	int p;
	if (now.nl == L) return 0;
	if (!slow) return 1;
	if (!now.nl) return 0;
	if (TIE) {  /* started together: nobody has begun the other one yet */
		for (p = 0; p < P; p++) if (now.ses[p] == now.nl) return 0;
		return !now.torn[now.nl] && !(now.chosen & BIT(now.nl));
	}
	for (p = 0; p < P; p++) if (LAG && linked(p) && now.heard[p] == now.nl) return 1;
	return 0;
}
static int may_stray(int only)
{
	int l, strays = 0;
	for (l = 1; l <= now.nl; l++) strays += !!(now.stray & BIT(l));
	return only == N || strays < STRAYS;
}
static void start(int slow, int only)  /* `only`: on this position alone; N: on all */
{
	int p, top = 0, l = now.nl + 1, clock = slow ? now.epoch[now.nl] : l;
	for (p = 0; p < P; p++) {
		if (!linked(p) || (only < N && p != only)) continue;
		if (p < N) now.mem[p] |= BIT(l);
		if (now.epoch[newest_known(p)] > top) top = now.epoch[newest_known(p)];
	}
	if (MUTANT("no-clock")) clock = 0;
	now.nl = l; now.epoch[l] = top + 1 > clock ? top + 1 : clock;
	if (only < N) now.stray |= BIT(l);
	SAY("launch %d starts%s: epoch %d", l, only < N ? " on one position alone" : "", now.epoch[l]);
}

/* Begin: from here on the agent works for launch l and refuses older ones. It comes before the inventory, so that
   nothing is committed by an older launch after it was counted. */
static int may_begin(int l, int p)
{
	if (l > now.nl || now.ses[p] == l || !(now.mem[p] & BIT(l)) || older(l, newest_known(p))) return 0;
	return MUTANT("begin-after-inventory") ? !!(now.chosen & BIT(l)) : !(now.chosen & BIT(l));
}
static void begin(int l, int p) { take_over(p, l); SAY("launch %d begins on node %d", l, p); }

static int is_stray(int l) { return !!(now.stray & BIT(l)); }
static int shows(int p, int l) { return linked(p) && ((p >= N && !is_stray(l)) || (now.mem[p] & BIT(l))) && !older(l, newest_known(p)); }
static int complete(int u, int l)  /* every rank's shard of u lies on a machine that launch l sees */
{
	int p, r, v, found;
	for (r = 0; r < N; r++) {
		for (found = 0, p = 0; p < P; p++) for (v = 1; v <= now.nu; v++)
			found |= shows(p, l) && same_name(u, v) && (H(p, r) & BIT(v));
		if (!found) return 0;
	}
	return 1;
}
static int one_instance(int u, int l)
{
	int p, r, v, found = 0;
	for (p = 0; p < P; p++) for (r = 0; r < N; r++) for (v = 1; v <= now.nu; v++)
		if (shows(p, l) && same_name(u, v) && (H(p, r) & BIT(v))) { if (found && found != v) return 0; found = v; }
	return 1;
}
/* The histories among what launch l sees: lines that no other one knows of, with something whole of their own; newest
   first. A launch that none knows of is one. */
static int whole_on(int l, int head)
{
	int u, mask = 0;
	for (u = 1; u <= now.nu; u++) if (complete(u, l) && on_line(head, u)) mask |= BIT(u);
	return mask;
}
static int histories(int l, int found[L+1])
{
	int p, u, h, g, n = 0, heads = 0, ends = 0, held[L+1];
	for (p = 0; p < P; p++) if (shows(p, l)) heads |= now.lines[p];
	for (u = 1; u <= now.nu; u++) {
		int known = !complete(u, l);
		for (h = 1; h <= now.nl; h++) known |= (heads & BIT(h)) && cut_of(h, now.launch[u]) != UNKNOWN;
		if (!known) heads |= BIT(now.launch[u]);
	}
	for (h = 1; h <= now.nl; h++) {
		int is_end = !!(heads & BIT(h));
		for (g = 1; g <= now.nl; g++) if (g != h && (heads & BIT(g)) && (now.knows[g] & BIT(h))) is_end = 0;
		held[h] = is_end ? whole_on(l, h) : 0;
		if (held[h]) ends |= BIT(h);
	}
	for (h = 1; h <= now.nl; h++) {
		int has_own = !!(ends & BIT(h));
		for (g = 1; g <= now.nl; g++) {
			if (g == h || !(ends & BIT(g)) || (held[h] & ~held[g])) continue;
			if (held[h] != held[g] || older(h, g)) has_own = 0;
		}
		if (has_own) found[n++] = h;
	}
	for (h = 1; h < n; h++) if (older(found[0], found[h])) { g = found[0]; found[0] = found[h]; found[h] = g; }
	return n;
}
static int there(int l)  /* launches that anything that l sees tells of */
{
	int p, r, u, h, mask = 0;
	for (p = 0; p < P; p++) {
		if (!shows(p, l)) continue;
		mask |= now.lines[p];
		for (h = 1; h <= now.nl; h++) if (now.lines[p] & BIT(h)) mask |= now.knows[h];
		for (r = 0; r < N; r++) for (u = 1; u <= now.nu; u++) if (H(p, r) & BIT(u)) mask |= BIT(now.launch[u]);
	}
	return mask;
}
enum wish { NEWEST, OLDER_STEP, OLDER, NEWER };  /* what a person asks for: an older step; one of two histories */
static int may_choose(int l, int wish)
{
	int p;
	if (l > now.nl || (now.chosen & BIT(l)) || !acts(l) || (wish && now.rollbacks == ROLLBACKS)) return 0;
	for (p = 0; p < N; p++) {
		if (is_stray(l) && !(now.mem[p] & BIT(l))) continue;
		if (MUTANT("begin-after-inventory") ? !shows(p, l) : !works_for(p, l)) return 0;
	}
	return 1;
}
/* load: inventory, choice, retrieval, by all ranks together. */
static void choose(int l, int wish)
{
	int p, r, u, v, count, line = 0, pick = 0, before = 0, exists = 0, all, found[L+1];
	if (wish) now.rollbacks++;
	for (p = 0; p < P; p++) {
		if (!shows(p, l)) continue;
		if (p >= N) take_over(p, l);  /* a machine that came back, without a rank: begun like the others */
		for (r = 0; r < N; r++) exists |= H(p, r);
	}
	count = histories(l, found);
	if (count > 1 && wish < OLDER && !MUTANT("newest-history-wins")) {
		SAY("launch %d raises: two histories, of launches %d and %d", l, found[0], found[1]);
		return;
	}
	if (count < 2 && wish >= OLDER) { SAY("launch %d: there is one history, and nothing to choose", l); return; }
	if (count) line = found[wish == OLDER ? count - 1 : 0];
	for (u = 1; u <= now.nu; u++) {
		if (!line || !on_line(line, u) || kills(line, u) || !complete(u, l)) continue;
		if (!pick || newer(u, pick)) { before = pick; pick = u; }
		else if (newer(pick, u) && (!before || newer(u, before))) before = u;
	}
	if (wish == OLDER_STEP && !before) { SAY("launch %d asks for an older step in vain", l); return; }
	if (wish == OLDER_STEP) pick = before;
	SAY("launch %d, line of launch %d: loads u%d (epoch %d step %d)%s; promised is u%d, hit %d times", l, line, pick,
	    now.epoch[now.launch[pick]], now.step[pick], wish ? ", as was asked for" : "", now.promised, now.exposed);
	all = there(l);
	if (pick) {
		int known = BIT(now.launch[pick]);
		if (!MUTANT("only-the-parent")) known |= now.knows[line] | BIT(line);
		if (wish && !MUTANT("forgets-the-given-up")) known |= all;  /* the job goes on without them */
		for (v = 1; v <= now.nl; v++) if ((known & BIT(v)) && older(v, l)) now.knows[l] |= BIT(v);
		now.picked[l] = pick;
		MUST(2, one_instance(pick, l));  /* I2 NEVER-MIX, under any number of faults */
	}
	if (wish) {
		now.promised = now.exposed = 0; now.rolled = l; now.base = pick;
		for (u = 1; u <= now.nu; u++)  /* I3: what was not chosen is given up, also what is away */
			MUST(3, !(all & BIT(now.launch[u])) || !older(now.launch[u], l) || true_cut(l, now.launch[u]) != UNKNOWN);
	} else {
		/* I1 DURABLE and I3 NO-RESURRECTION: the promised one, or what was made from it */
		int binds = now.promised && now.exposed <= 1 && (!is_stray(l) || complete(now.promised, l));
		MUST(pick && complete(now.promised, l) ? 3 : 1, !binds || (pick && stems(pick, now.promised)));
		MUST(3, !binds || !given_up(pick));
		/* I4 ONE-HISTORY: nothing of a history that this one does not know is passed over in silence */
		for (u = 1; pick && u <= now.nu; u++)
			MUST(4, !complete(u, l) || !older(now.launch[u], l) || true_cut(l, now.launch[u]) != UNKNOWN);
		if (now.promised && pick && !stems(pick, now.promised) && dead(l, now.promised)) now.promised = now.exposed = 0;
		if (pick != now.base) now.base = 0;
	}
	if (!pick && exists) {
		SAY("launch %d raises: something is there, nothing is usable", l);
		if (!MUTANT("fresh-start")) return;
	}
	if (!pick) MUST(9, !exists);  /* I9 NO-FRESH-START */
	now.chosen |= BIT(l); now.picked[l] = now.last[l] = pick;
	if (pick && !is_stray(l)) for (r = 0; r < N; r++) H(r, r) |= BIT(pick);  /* each rank's shard comes to its node */
	redundancy();
}

/* The line is put on every node at the end of a load that loaded something; else by each rank before its first shard. A
   newer one stays in force. */
static int may_claim(int l, int p)
{
	if (!(now.chosen & BIT(l)) || (now.lines[p] & BIT(l)) || (p < N && (now.claimed[l] & BIT(p)))) return 0;
	if (!now.picked[l] && !now.last[l] && !MUTANT("claims-at-load")) return 0;
	if (MUTANT("line-overwritten")) return !!(now.mem[p] & BIT(l));
	return now.ses[p] == l && !quiet(p);
}
static void claim(int l, int p)
{
	keep_line(p, l); now.seen[p] = later(now.seen[p], l);
	if (p < N) now.claimed[l] |= BIT(p);
	MUST(8, !older(l, now.took[p]));  /* I8 FENCED-WRITER */
	now.took[p] = later(now.took[p], l);
	SAY("the line of launch %d is on node %d", l, p);
	redundancy();
}

/* -------- save -------- */
static int may_save(int l, int c)
{
	return now.nu < U && l <= now.nl && acts(l) && works_for(c, l) && !is_stray(l)
	    && (now.picked[l] ? (now.claimed[l] & 1) : (now.chosen & BIT(l)))
	    && (now.last[l] == now.picked[l] || (now.sealed[now.last[l]] & 1));  /* rank 0 may be ahead of the others */
}
static void save(int l)
{
	int u = ++now.nu;
	now.launch[u] = l; now.parent[u] = now.last[l]; now.step[u] = now.step[now.last[l]] + 1; now.last[l] = u;
	SAY("launch %d saves u%d (epoch %d step %d)", l, u, now.epoch[l], now.step[u]);
}

/* The trainer seals by a rename, without asking anybody: a paused one does so whenever it wakes up. */
static int may_seal(int p, int r, int u)
{
	int l = now.launch[u];
	return u <= now.nu && !(now.sealed[u] & BIT(r)) && (now.mem[p] & BIT(l)) && (now.claimed[l] & BIT(r)) && acts(l);
}
static void seal(int p, int r, int u)
{
	int v, q;
	now.sealed[u] |= BIT(r); H(p, r) |= BIT(u);
	SAY("node %d: rank %d sealed u%d", p, r, u);
	if (MUTANT("report-on-seal") && works_for(p, now.launch[u])) {
		now.reports[r] |= BIT(u);
		if (r == 0) COUNTED(p, 0) |= BIT(u);
	}
	if (MUTANT("collect-on-seal") && works_for(p, now.launch[u]))
		for (v = 1; v < u; v++) if (newer(u, v)) {
			MUST(5, v != now.promised || !holds(p, v));
			for (q = 0; q < N; q++) H(p, q) &= ~BIT(v);
		}
}

/* Copy to the next node: verified, sealed there, acknowledged. One step, because it counts from its end: the
   receiver looks at launch and line again after the last byte. It is repeated while the acknowledgement is missing
   or the copy is ("lost"). */
static int may_push(int a, int b, int r, int u)
{
	int l = now.launch[u];
	if (u > now.nu || !(H(a, r) & BIT(u)) || ((H(b, r) & BIT(u)) && (now.acks[r] & BIT(u)))) return 0;
	if (!linked(a) || !linked(b) || !works_for(a, l) || droppable(a, u)) return 0;
	if (MUTANT("zombie-accepted")) return !!(now.mem[b] & BIT(l));
	return works_for(b, l) && !droppable(b, u);
}
static void push(int a, int b, int r, int u)
{
	MUST(8, !older(now.launch[u], now.took[b]));  /* I8 FENCED-WRITER */
	H(b, r) |= BIT(u); now.acks[r] |= BIT(u);
	SAY("node %d copied u%d of rank %d to node %d, which sends an acknowledgement", a, u, r, b);
	redundancy();
}

/* A rank's own copy went bad ("want"): the node that holds the replica gives it back. Of any launch. */
static int may_give_back(int a, int b, int r, int u)
{
	return u <= now.nu && (now.sealed[u] & BIT(r)) && (H(b, r) & BIT(u)) && !(H(a, r) & BIT(u)) && linked(a) && linked(b)
	    && now.ses[a] == now.ses[b] && works_for(a, now.ses[a]) && works_for(b, now.ses[a]) && !droppable(a, u);
}
static void give_back(int a, int b, int r, int u)
{
	H(a, r) |= BIT(u);
	SAY("node %d gave u%d of rank %d back to node %d", b, u, r, a);
	redundancy();
}

/* Heal: of what is kept (the newest committed generation of the launch, or before there is one what it has loaded)
   any member gives a copy to any other, whichever launch wrote it. Nobody counts it for a commit. The receiver may
   know of the record by hearsay only: it takes what nothing it knows has killed or followed. */
static int kept(int p)
{
	int record = licence(p), loaded = in_force(p) == now.ses[p] ? now.picked[now.ses[p]] : 0;
	return record && (!loaded || newer(record, loaded)) ? record : loaded;
}
static int may_heal(int a, int b, int r, int u)
{
	if (a == b || u > now.nu || !(H(a, r) & BIT(u)) || (H(b, r) & BIT(u)) || !linked(a) || !linked(b)) return 0;
	if (!now.ses[a] || !(now.mem[b] & BIT(now.ses[a]))) return 0;
	if (MUTANT("heal-zombie")) return kept(a) == u && !droppable(b, u);
	if (now.ses[a] != now.ses[b] || !works_for(a, now.ses[a]) || !works_for(b, now.ses[a])) return 0;
	if (MUTANT("heal-anything")) return now.launch[u] != now.ses[a];
	return kept(a) == u && !droppable(b, u);
}
static void heal(int a, int b, int r, int u)
{
	SAY("node %d gave u%d of rank %d to node %d, to heal", a, u, r, b);
	MUST(8, !older(now.ses[a], now.took[b]));  /* I8 FENCED-WRITER */
	H(b, r) |= BIT(u);
	redundancy();
}

/* -------- commit -------- */
static int may_report(int a, int r, int u)  /* an acknowledgement arrives, maybe for the second time */
{
	if (!(now.acks[r] & BIT(u)) || !linked(a) || !works_for(a, now.launch[u])) return 0;
	return !(now.reports[r] & BIT(u)) || (r == 0 && !(COUNTED(a, 0) & BIT(u)) && licence(a) < u);
}
static void report(int a, int r, int u)
{
	now.reports[r] |= BIT(u);
	if (r == 0) COUNTED(a, 0) |= BIT(u);  /* the coordinator's own rank: no message */
	SAY("node %d has the acknowledgement of u%d for rank %d, and reports", a, u, r);
}

static int coordinates(int c, int u)
{
	if (MUTANT("late-report")) return now.ses[c] && (now.mem[c] & BIT(now.launch[u]));
	return works_for(c, now.launch[u]);
}
static int may_count(int c, int r, int u)
{
	return (now.reports[r] & BIT(u)) && !(COUNTED(c, r) & BIT(u)) && linked(c) && coordinates(c, u);
}
static void count(int c, int r, int u)
{
	COUNTED(c, r) |= BIT(u);
	SAY("coordinator %d counts rank %d of u%d", c, r, u);
}

static int every_rank(int c, int u)
{
	int r, counted = 0;
	for (r = 0; r < N; r++) counted += !!(COUNTED(c, r) & BIT(u));
	return counted == N || (counted && MUTANT("commit-on-first-report"));
}
static int may_commit(int c, int u)
{
	return u <= now.nu && every_rank(c, u) && coordinates(c, u)
	    && (!now.rec[c] || now.launch[now.rec[c]] != now.ses[c] || newer(u, now.rec[c]));
}
static void commit(int c, int u)
{
	SAY("coordinator %d COMMITS u%d", c, u);
	now.rec[c] = u; now.announced |= BIT(u);
	MUST(8, !older(now.launch[u], now.took[c]));  /* I8 FENCED-WRITER */
	/* I6 HONEST-LEVEL: nothing but a fault took a copy since it was acknowledged */
	MUST(6, full(u) || now.hit[u] || given_up(u));
	if (now.promised && stems(now.promised, u)) return;  /* something newer of this line is promised */
	if (given_up(u)) return;  /* on purpose */
	/* More than k of its machines were away, and meanwhile another launch went on without them: beyond what k covers. */
	if (now.torn[now.launch[u]] > 1 && !(now.promised && stems(u, now.promised))) return;
	/* Another history, which began where nothing of the promised one could be seen: I1 goes on with the older promise, and
	   I4 and I7 hold for both. */
	if (now.promised && true_cut(now.launch[u], now.launch[now.promised]) == UNKNOWN) return;
	/* I3: promises form one line */
	MUST(3, !now.promised || now.exposed > 1 || now.hit[u] > 1 || stems(u, now.promised));
	now.promised = u; now.exposed = full(u) ? 0 : now.hit[u]; now.base = 0;
}
static int may_foretell(int c, int u)
{
	if (u > now.nu || (now.announced & BIT(u)) || !coordinates(c, u)) return 0;
	if (MUTANT("announce-before-record")) return every_rank(c, u);
	return MUTANT("announce-before-reports") && (COUNTED(c, 0) & BIT(u));
}
static void foretell(int c, int u)
{
	now.announced |= BIT(u);
	SAY("coordinator %d announces u%d", c, u);
}

/* The announcement, or an answer that repeats it. */
static int may_learn_record(int p, int u)
{
	return (now.announced & BIT(u)) && linked(p) && now.ses[p] == now.launch[u] && !quiet(p)
	    && (!now.rec[p] || now.launch[now.rec[p]] != now.ses[p] || newer(u, now.rec[p]));
}
static void learn_record(int p, int u)
{
	now.rec[p] = u;
	SAY("node %d knows that u%d is committed", p, u);
}

/* -------- collection, hearsay, faults -------- */
static int may_collect(int p, int u) { return u <= now.nu && holds(p, u) && droppable(p, u); }
static void collect(int p, int u)
{
	int r;
	SAY("node %d drops u%d", p, u);
	MUST(5, u != now.promised || !informed(p));  /* I5 NO-EARLY-GC */
	/* I7 OTHERS-KEPT */
	MUST(7, now.launch[u] == now.ses[p] || true_cut(in_force(p), now.launch[u]) != UNKNOWN
	     || true_cut(now.ses[p], now.launch[u]) != UNKNOWN);
	for (r = 0; r < N; r++) H(p, r) &= ~BIT(u);
}

/* Messages and answers carry launch and line, a refusal too: who hears of newer ones adopts them. */
static int may_hear(int b, int a)
{
	if (a == b || !linked(a) || !linked(b)) return 0;
	if (!(now.mem[a] & now.mem[b]) && !(now.ses[a] && now.ses[a] == now.ses[b])) return 0;
	if (LAG && now.heard[b] < now.heard[a]) return 1;
	if (MUTANT("not-learned")) return 0;
	if (older(newest_known(b), newest_known(a))) return 1;
	return older(in_force(b), in_force(a)) && !older(in_force(a), newest_known(b));
}
static void hear(int b, int a)
{
	if (!MUTANT("not-learned")) {
		now.seen[b] = later(now.seen[b], newest_known(a));
		/* The line of a launch that was overtaken comes too late: the newer one chooses from what lies here. */
		if (in_force(a) && !older(in_force(a), newest_known(b))) keep_line(b, in_force(a));
		now.took[b] = later(now.took[b], in_force(b));
	}
	if (LAG && now.heard[b] < now.heard[a]) now.heard[b] = now.heard[a];
	SAY("node %d hears from node %d; it knows of launch %d, line of launch %d", b, a, newest_known(b), in_force(b));
	redundancy();
}

static int may_lose(int p) { return LOSS && now.faults < FAULTS && now.mem[p] && linked(p); }
static void lose(int p)
{
	struck(p); blank(p);
	if (p >= N) now.away |= BIT(p);
	SAY("machine %d is LOST", p);
}
static int may_cut(int p) { return now.faults < FAULTS && now.ses[p] && !now.mem[N + p]; }
static void cut(int p)
{
	int r;
	struck(p); now.away |= BIT(N + p);
	for (r = 0; r < N; r++) { H(N + p, r) = H(p, r); if (p == 0) COUNTED(N, r) = COUNTED(0, r); }
	now.rec[N + p] = now.rec[p]; now.ses[N + p] = now.ses[p]; now.seen[N + p] = now.seen[p]; now.mem[N + p] = now.mem[p];
	now.lines[N + p] = now.lines[p]; now.took[N + p] = now.took[p]; now.heard[N + p] = now.heard[p];
	blank(p);
	SAY("machine %d is CUT OFF with its memory (it is %d from here on); a blank one takes its place", p, N + p);
}
static int may_come_back(int p) { return !linked(p) && now.mem[p]; }
static void come_back(int p) { now.away &= ~BIT(p); SAY("machine %d COMES BACK", p); }

static int may_restart(int p) { return now.restarts < RESTARTS && now.ses[p] && linked(p); }
static void restart(int p)
{
	int r;
	now.restarts++;
	if (MUTANT("forgetful-agent")) now.ses[p] = now.lines[p] = 0;
	now.seen[p] = later(now.ses[p], in_force(p));
	if (p % N == 0) for (r = 0; r < N; r++) COUNTED(p, r) = 0;
	SAY("agent of node %d RESTARTS", p);
}

static int may_rot(int p, int r, int u)
{
	return ROT && now.faults < FAULTS && u <= now.nu && linked(p) && (H(p, r) & BIT(u));
}
static void rot(int p, int r, int u)
{
	now.faults++; H(p, r) &= ~BIT(u);
	if (now.hit[u] < 2) now.hit[u]++;
	if (u == now.promised) now.exposed++;
	SAY("node %d: its copy of u%d of rank %d is BAD and set aside", p, u, r);
}
static int may_drop_acked(int p, int r, int u)
{
	return MUTANT("drop-acked") && p % N != r && (H(p, r) & BIT(u)) && (now.acks[r] & BIT(u)) && now.hit[u] == 0;
}
static void drop_acked(int p, int r, int u)
{
	H(p, r) &= ~BIT(u);
	SAY("node %d drops its acknowledged copy of u%d of rank %d to make room", p, u, r);
}

/* -------- swift -------- */
static void launch_at_once(int slow, int back, int only)
{
	int p, l;
	start(slow, only); l = now.nl;
	for (p = 0; p < N; p++) if (may_begin(l, p)) begin(l, p);
	if (!may_choose(l, back)) return;
	choose(l, back);
	for (p = 0; p < P; p++) if (may_claim(l, p)) claim(l, p);
}
enum stage { ONE_SEALED, ALL_SEALED, COPIED, COMMITTED, ANNOUNCED };
static int may_save_at_once(int c)
{
	int p, l = now.ses[c];
	if (c >= N || !l || !may_save(l, c)) return 0;
	for (p = 0; p < N; p++) if (!works_for(p, l) || (now.picked[l] && in_force(p) != l)) return 0;
	return 1;
}
static void save_at_once(int stage)
{
	int r, l = now.ses[0], u;
	save(l); u = now.nu;
	for (r = 0; r < (stage == ONE_SEALED ? 1 : N); r++) if (may_claim(l, r)) claim(l, r);
	for (r = 0; r < (stage == ONE_SEALED ? 1 : N); r++) seal(r, r, u);
	if (stage < COPIED) return;
	for (r = 0; r < N; r++) { push(r, (r + 1) % N, r, u); report(r, r, u); }
	if (stage < COMMITTED) return;
	for (r = 1; r < N; r++) count(0, r, u);
	commit(0, u);
	if (stage == ANNOUNCED) for (r = 1; r < N; r++) learn_record(r, u);
}

/* -------- all events -------- */
enum kind { LAUNCH_AT_ONCE, SAVE_AT_ONCE, START, BEGIN, CHOOSE, CLAIM, SAVE, SEAL, PUSH, GIVE_BACK, REPORT, COUNT,
            COMMIT, FORETELL, RECORD, COLLECT, HEAR, LOSE, CUT, COME_BACK, RESTART, ROTS, HEALS, DROP_ACKED };
struct event { unsigned char kind, a, b, r, u; };
#define EVENTS 256
static struct event events[EVENTS];
static int event_count;

static void add(int kind, int a, int b, int r, int u)
{
	struct event event = { kind, a, b, r, u };
	if (event_count == EVENTS) { fprintf(stderr, "more events than EVENTS\n"); exit(2); }
	events[event_count++] = event;
}
static void list_events(void)
{
	int p, q, r, u, l;
	now.away = (BIT(P) - 1) & ~(BIT(N) - 1);
	for (q = 0; q <= (TIE || LAG); q++) {
		if (!SWIFT) add(START, q, 0, N, 0);
		else for (r = NEWEST; r <= (ROLLBACKS ? NEWER : NEWEST); r++) add(LAUNCH_AT_ONCE, q, r, N, 0);
	}
	if (STRAYS) for (p = 0; p < N; p++) add(SWIFT ? LAUNCH_AT_ONCE : START, 0, 0, p, 0);
	if (SWIFT) for (q = ONE_SEALED; q <= ANNOUNCED; q++) add(SAVE_AT_ONCE, q, 0, 0, 0);
	if (!SWIFT) for (l = 1; l <= L; l++) {
		for (r = NEWEST; r <= (ROLLBACKS ? NEWER : NEWEST); r++) add(CHOOSE, l, r, 0, 0);
		for (p = 0; p < P; p++) {
			if (p < N) add(BEGIN, l, p, 0, 0);
			add(CLAIM, l, p, 0, 0);
			if (p % N == 0) add(SAVE, l, p, 0, 0);
		}
	}
	for (p = 0; p < P; p++) {
		for (u = 1; u <= U; u++) {
			add(SEAL, p, 0, p % N, u); add(REPORT, p, 0, p % N, u); add(RECORD, p, 0, 0, u); add(COLLECT, p, 0, 0, u);
			for (q = 0; q < P; q++) {
				if (q % N != (p + 1) % N) continue;
				add(PUSH, p, q, p % N, u);
				if (ROT) add(GIVE_BACK, p, q, p % N, u);
			}
			for (q = 0; q < P; q++) for (r = 0; r < N; r++) if (HEAL && p != q) add(HEALS, p, q, r, u);
			for (r = 0; r < N; r++) { if (ROT) add(ROTS, p, 0, r, u); if (mutant("drop-acked")) add(DROP_ACKED, p, 0, r, u); }
			if (p % N == 0) {
				for (r = 1; r < N; r++) add(COUNT, p, 0, r, u);
				add(COMMIT, p, 0, 0, u);
				if (mutant("announce-before-record") || mutant("announce-before-reports")) add(FORETELL, p, 0, 0, u);
			}
		}
		for (q = 0; q < P; q++) add(HEAR, p, q, 0, 0);
		if (LOSS) add(LOSE, p, 0, 0, 0);
		if (RESTARTS) add(RESTART, p, 0, 0, 0);
		if (p < LIMBO) add(CUT, p, 0, 0, 0);
		if (p >= N) add(COME_BACK, p, 0, 0, 0);
	}
}
static int may(int index)
{
	struct event e;
	if (index >= event_count) return 0;
	e = events[index];
	switch (e.kind) {
	case LAUNCH_AT_ONCE: return may_start(e.a) && may_stray(e.r) && now.rollbacks + !!e.b <= ROLLBACKS;
	case SAVE_AT_ONCE: return may_save_at_once(0);
	case START: return may_start(e.a) && may_stray(e.r);
	case BEGIN: return may_begin(e.a, e.b);
	case CHOOSE: return may_choose(e.a, e.b);
	case CLAIM: return may_claim(e.a, e.b);
	case SAVE: return may_save(e.a, e.b);
	case SEAL: return may_seal(e.a, e.r, e.u);
	case PUSH: return may_push(e.a, e.b, e.r, e.u);
	case GIVE_BACK: return may_give_back(e.a, e.b, e.r, e.u);
	case REPORT: return may_report(e.a, e.r, e.u);
	case COUNT: return may_count(e.a, e.r, e.u);
	case COMMIT: return may_commit(e.a, e.u);
	case FORETELL: return may_foretell(e.a, e.u);
	case RECORD: return may_learn_record(e.a, e.u);
	case COLLECT: return may_collect(e.a, e.u);
	case HEAR: return may_hear(e.a, e.b);
	case LOSE: return may_lose(e.a);
	case CUT: return may_cut(e.a);
	case COME_BACK: return may_come_back(e.a);
	case RESTART: return may_restart(e.a);
	case ROTS: return may_rot(e.a, e.r, e.u);
	case HEALS: return may_heal(e.a, e.b, e.r, e.u);
	default: return may_drop_acked(e.a, e.r, e.u);
	}
}
static void happen(int index)
{
	struct event e = events[index];
	if (readtrail) printf("STEP\n");
	switch (e.kind) {
	case LAUNCH_AT_ONCE: launch_at_once(e.a, e.b, e.r); break;
	case SAVE_AT_ONCE: save_at_once(e.a); break;
	case START: start(e.a, e.r); break;
	case BEGIN: begin(e.a, e.b); break;
	case CHOOSE: choose(e.a, e.b); break;
	case CLAIM: claim(e.a, e.b); break;
	case SAVE: save(e.a); break;
	case SEAL: seal(e.a, e.r, e.u); break;
	case PUSH: push(e.a, e.b, e.r, e.u); break;
	case GIVE_BACK: give_back(e.a, e.b, e.r, e.u); break;
	case REPORT: report(e.a, e.r, e.u); break;
	case COUNT: count(e.a, e.r, e.u); break;
	case COMMIT: commit(e.a, e.u); break;
	case FORETELL: foretell(e.a, e.u); break;
	case RECORD: learn_record(e.a, e.u); break;
	case COLLECT: collect(e.a, e.u); break;
	case HEAR: hear(e.a, e.b); break;
	case LOSE: lose(e.a); break;
	case CUT: cut(e.a); break;
	case COME_BACK: come_back(e.a); break;
	case RESTART: restart(e.a); break;
	case ROTS: rot(e.a, e.r, e.u); break;
	case HEALS: heal(e.a, e.b, e.r, e.u); break;
	default: drop_acked(e.a, e.r, e.u);
	}
}
}

#define E(n) :: d_step { c_expr { (may)(n) } -> c_code { happen(n); }; assert(!broken) }
#define E4(n) E(n) E(n+1) E(n+2) E(n+3)
#define E16(n) E4(n) E4(n+4) E4(n+8) E4(n+12)
#define E64(n) E16(n) E16(n+16) E16(n+32) E16(n+48)

active proctype flashckpt()
{
	d_step { c_code { list_events(); } };
	if :: TIE || LAG -> flip = 1 :: flip = 0 fi;
end:	do
	E64(0) E64(64) E64(128) E64(192)
	od
}
