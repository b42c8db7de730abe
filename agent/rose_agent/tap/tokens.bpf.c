// The filter of the tap's *whole* socket: passes what the classic one passes (`rose_agent.os.bpf`), but
// counts the tokens of the streams that user space has entrusted to it, and keeps those segments back.
//
// A stream is one response under way, entrusted at a position that is the border of two chunks. Of it
// the program keeps back a segment of the server only if it can follow it for sure:
//
// | segment | then |
// |---|---|
// | begins at the position, consists of whole chunks of an event stream, none of them the last | counted, kept back |
// | was seen before, wholly | kept back: the reader ignores it too |
// | anything else: ahead, overlapping, half a chunk, an end, `[DONE]`, long, FIN, RST, SYN | passed, and the stream is handed over |
//
// A stream that was handed over stays with the reader until it is entrusted anew. Position, tokens
// and that mark are one word, changed by compare and exchange: two processors never both count.
// Next step: `kernel_program` loads it, `kernel_counts` entrusts streams and reads their words.
#include <linux/bpf.h>
#include <linux/if_packet.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

char LICENSE[] SEC("license") = "Dual BSD/GPL";

#define SNAP 65535
#define LONGEST 4096	  // bytes; a segment of so many and more is the reader's
#define MASK (LONGEST - 1)
#define MOST_CHUNKS 16	  // in one segment
#define WORD 8		  // bytes looked at together
#define BLOCK 64	  // bytes looked at in one round
#define MARGIN 8	  // bytes before and behind a segment, so that what is around each of its bytes can be read
#define LOOPBACK 1	  // its number is the same in every namespace
#define HANDED_OVER (1ULL << 31)

enum flags { FIN = 0x01, SYN = 0x02, RST = 0x04 };

const volatile __u16 port;

struct client {
	__u8 address[16]; // IPv4: the first four
	__u16 port;
	__u16 version; // of IP
};

struct stream {
	__u64 word; // position (32 bits), handed over (1), tokens (31)
	__u64 last_ns; // of the newest segment with tokens: when, its bytes, its tokens
	__u32 last_size;
	__u32 last_tokens;
	__u64 request; // for whoever reads the map: its number, its tokens before it was entrusted
	__u64 before;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC); // user space alone makes entries
	__uint(max_entries, 1024);
	__type(key, struct client);
	__type(value, struct stream);
} streams SEC(".maps");

struct bytes {
	__u8 at[MARGIN + LONGEST + MARGIN];
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct bytes);
} scratch SEC(".maps");

struct segment {
	struct client client;
	__u32 sequence;
	__u32 payload; // its offset
	__u32 size;
	__u32 whole; // nothing of it is missing here
	__u32 flags;
	__u32 to_server;
};

static __always_inline int read_headers(struct __sk_buff *skb, struct segment *out)
{
	__u8 ip[48], tcp[14];
	__u32 head, total;
	__u16 source, target;

	if (bpf_skb_load_bytes(skb, 0, ip, 40))
		return 0;
	if (ip[0] >> 4 == 4) {
		if (ip[9] != 6 || ((ip[6] & 0x1f) | ip[7]))
			return 0;
		head = (ip[0] & 0x0f) * 4;
		total = ip[2] << 8 | ip[3];
		out->whole = !(ip[6] & 0x20); // no more fragments
		out->client.version = 4;
	} else if (ip[0] >> 4 == 6) {
		head = 40;
		if (ip[6] == 0) {
			if (bpf_skb_load_bytes(skb, 40, ip + 40, 2) || ip[40] != 6 || ip[41])
				return 0;
			head = 48;
		} else if (ip[6] != 6) {
			return 0;
		}
		total = (ip[4] << 8 | ip[5]) + 40;
		out->whole = head == 40; // a jumbo segment is the reader's
		out->client.version = 6;
	} else {
		return 0;
	}
	if (!head || bpf_skb_load_bytes(skb, head, tcp, sizeof(tcp)))
		return 0;
	source = tcp[0] << 8 | tcp[1];
	target = tcp[2] << 8 | tcp[3];
	if (target != port && source != port)
		return 0;
	out->to_server = target == port;
	out->client.port = out->to_server ? source : target;
	if (out->client.version == 4)
		__builtin_memcpy(out->client.address, ip + (out->to_server ? 12 : 16), 4);
	else
		__builtin_memcpy(out->client.address, ip + (out->to_server ? 8 : 24), 16);
	out->sequence = (__u32)tcp[4] << 24 | tcp[5] << 16 | tcp[6] << 8 | tcp[7];
	out->flags = tcp[13];
	out->payload = head + (tcp[12] >> 4) * 4;
	out->whole &= total <= skb->len && total >= out->payload;
	out->size = out->whole ? total - out->payload : 0;
	return 1;
}

struct scan {
	__u8 *at;
	__u32 size;
	__u32 tokens;
	__u32 ends; // it has the event that ends a stream
};

#define TOKEN 0x646174613a20ULL	      // "data: "
#define ENDING 0x646174613a205b44ULL // "data: [D"
#define SPACES 0x2020202020202020ULL
#define ONES 0x0101010101010101ULL

// Whether it is zero, without a branch: the verifier would follow both sides for each byte.
static __always_inline __u32 is_zero(__u64 value)
{
	value |= -value;
	asm volatile("" : "+r"(value)); // else the compiler makes a branch of it
	value >>= 63;
	asm volatile("" : "+r"(value));
	return 1 ^ value;
}

// The event's name ends in a space, and most words of a segment have none.
static long look_at_block(__u32 number, struct scan *scan)
{
	for (int i = 0; i < BLOCK; i += WORD) {
		__u32 first = number * BLOCK + i;
		__u8 *at = scan->at + (first & MASK);
		__u64 spaces = *(__u64 *)(at + MARGIN) ^ SPACES;

		if (first >= scan->size)
			return 1;
		if (!((spaces - ONES) & ~spaces & ONES << 7))
			continue;
		for (int j = 0; j < WORD; j++) {
			__u64 around = bpf_be64_to_cpu(*(__u64 *)(at + MARGIN + j - 5)); // up to two bytes behind the space

			scan->tokens += is_zero(around >> 16 ^ TOKEN);
			scan->ends |= is_zero(around ^ ENDING);
		}
	}
	return 0;
}

static __always_inline int digit(__u8 byte)
{
	if (byte >= '0' && byte <= '9')
		return byte - '0';
	byte |= 0x20;
	return byte >= 'a' && byte <= 'f' ? byte - 'a' + 10 : -1;
}

struct walk {
	__u8 *at;
	__u32 size;
	__u32 next;  // where a chunk begins
	__u32 sound;
};

// One chunk: up to four digits, an empty line's half, so many bytes, and the same half again.
static long pass_chunk(__u32 number, struct walk *walk)
{
	__u32 length = 0, position = walk->next;
	int i, value;

	for (i = 0; i < 5; i++) {
		value = digit(walk->at[(position + i) & MASK]);
		if (value < 0)
			break;
		length = length << 4 | value;
	}
	position += i;
	if (!i || i > 4 || !length || walk->at[position & MASK] != '\r' || walk->at[(position + 1) & MASK] != '\n')
		return 1;
	position += 2 + length;
	if (position + 2 > walk->size || walk->at[position & MASK] != '\r' || walk->at[(position + 1) & MASK] != '\n')
		return 1;
	walk->next = position + 2;
	walk->sound = walk->next == walk->size;
	return walk->sound;
}

// Tokens of a segment of whole chunks; -1 where it is anything else.
static __always_inline int count(struct __sk_buff *skb, const struct segment *segment)
{
	__u32 zero = 0, size = segment->size;
	struct bytes *bytes = bpf_map_lookup_elem(&scratch, &zero);
	struct walk walk = {};
	struct scan scan = {};

	if (!bytes || !segment->whole || !size || size > MASK)
		return -1;
	if (bpf_skb_load_bytes(skb, segment->payload, bytes->at + MARGIN, size & MASK))
		return -1;
	*(__u64 *)(bytes->at + MARGIN + (size & MASK)) = 0; // what is left of an earlier one
	walk.at = bytes->at + MARGIN;
	walk.size = size;
	bpf_loop(MOST_CHUNKS, pass_chunk, &walk, 0);
	if (!walk.sound)
		return -1;
	scan.at = bytes->at;
	scan.size = size;
	bpf_loop(LONGEST / BLOCK, look_at_block, &scan, 0);
	return scan.ends ? -1 : (int)scan.tokens;
}

// Whether a segment of an entrusted stream is kept back.
static __always_inline int follow(struct __sk_buff *skb, const struct segment *segment, struct stream *stream)
{
	__u64 word = *(volatile __u64 *)&stream->word;
	__u32 next = word >> 32, behind = next - segment->sequence;
	int tokens;

	if (word & HANDED_OVER)
		return 0;
	if (!(segment->flags & (FIN | SYN | RST))) {
		if (segment->whole && behind < 1U << 31 && behind >= segment->size)
			return 1;
		tokens = behind ? -1 : count(skb, segment);
		if (tokens >= 0) {
			if (tokens) {
				stream->last_ns = bpf_ktime_get_ns();
				stream->last_size = segment->size;
				stream->last_tokens = tokens;
			}
			if (__sync_val_compare_and_swap(&stream->word, word,
							(__u64)(next + segment->size) << 32 |
								(((__u32)word + tokens) & 0x7fffffff)) == word)
				return 1;
		}
	}
	__sync_fetch_and_or(&stream->word, HANDED_OVER);
	return 0;
}

SEC("socket")
int tokens(struct __sk_buff *skb)
{
	struct segment segment = {};
	struct stream *stream;

	// A socket that hears every interface is shown what the loopback sends as well as what it gets.
	if (skb->ifindex == LOOPBACK && skb->pkt_type == PACKET_OUTGOING)
		return 0;
	if (!read_headers(skb, &segment))
		return 0;
	if (!(segment.flags & (FIN | SYN | RST)) && segment.payload >= skb->len)
		return 0;
	if (segment.to_server)
		return SNAP;
	stream = bpf_map_lookup_elem(&streams, &segment.client);
	return stream && follow(skb, &segment, stream) ? 0 : SNAP;
}
