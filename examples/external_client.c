/* A client of Sebulba in C: CartPole's physics ask a trainer, or `sebulba serve`, for actions.
 *
 *     cc -O2 -o external_client examples/external_client.c -lm
 *     ./external_client /tmp/seats TOKEN 100
 *
 * plays 100 episodes over the Unix socket /tmp/seats and prints their mean return. docs/external.md
 * lists the messages. Copy what is between the two lines into a program of your own: it sends one
 * array of floats as the observation, and reads a discrete action of 32 or 64 bits.
 */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

/* ---------------------------------------------------------------------------------------------- */

typedef struct {
  int socket;
  size_t size;
  unsigned char data[65536];
} Client;

static void fail(const char *what) {
  fprintf(stderr, "external_client: %s\n", what);
  exit(1);
}

static void put(Client *c, const void *bytes, size_t count) {
  if (c->size + count > sizeof c->data) fail("a message is too long");
  memcpy(c->data + c->size, bytes, count);
  c->size += count;
}

static void put_byte(Client *c, unsigned byte) {
  unsigned char one = (unsigned char)byte;
  put(c, &one, 1);
}

/* A number of `bytes` bytes in network byte order. */
static void put_big_endian(Client *c, uint64_t value, int bytes) {
  while (bytes--) put_byte(c, (unsigned)(value >> (8 * bytes)) & 255);
}

static void put_string(Client *c, const char *text) { /* msgpack: str 8 */
  put_byte(c, 0xd9);
  put_byte(c, (unsigned)strlen(text));
  put(c, text, strlen(text));
}

static void put_float(Client *c, double value) { /* msgpack: float 64 */
  uint64_t bits;
  memcpy(&bits, &value, sizeof bits);
  put_byte(c, 0xcb);
  put_big_endian(c, bits, 8);
}

/* Begins a frame: its length, which send_frame writes, and a map of so many entries. */
static void begin_frame(Client *c, const char *type, int entries) {
  c->size = 4;
  put_byte(c, 0x80 | (unsigned)entries);
  put_string(c, "type");
  put_string(c, type);
}

static void put_observation(Client *c, const float *values, int count) {
  put_string(c, "observation");
  put_byte(c, 0x81); /* a map with one part, whose name is empty */
  put_string(c, "");
  put_byte(c, 0xc6); /* bin 32; the elements are little-endian, as on most machines */
  put_big_endian(c, 4 * (uint64_t)count, 4);
  put(c, values, 4 * (size_t)count);
}

static void send_frame(Client *c) {
  size_t size = c->size, sent = 0;
  c->size = 0;
  put_big_endian(c, size - 4, 4);
  while (sent < size) {
    ssize_t now = write(c->socket, c->data + sent, size - sent);
    if (now <= 0) fail("the other side closed the connection");
    sent += (size_t)now;
  }
}

static void receive_exactly(Client *c, size_t size) {
  if (size > sizeof c->data) fail("an answer is too long");
  for (c->size = 0; c->size < size;) {
    ssize_t now = read(c->socket, c->data + c->size, size - c->size);
    if (now <= 0) fail("the other side closed the connection");
    c->size += (size_t)now;
  }
}

/* Receives a frame; prints it and ends if it is an error. */
static void receive_frame(Client *c) {
  receive_exactly(c, 4);
  receive_exactly(c, (size_t)c->data[0] << 24 | c->data[1] << 16 | c->data[2] << 8 | c->data[3]);
  if (c->size > 24 && !memcmp(c->data + 6, "\xa5" "error\xa7message", 14)) {
    size_t text = 21 + (c->data[20] == 0xd9 ? 1 : c->data[20] == 0xda ? 2 : 0);
    fprintf(stderr, "external_client: refused: %.*s\n", (int)(c->size - text), c->data + text);
    exit(1);
  }
}

/* The action of an "action" message: its last entry is a bin of 4 or 8 bytes. */
static int64_t action_of(const Client *c) {
  int64_t wide = 0;
  int32_t narrow = 0;
  if (c->size > 9 && c->data[c->size - 9] == 8) {
    memcpy(&wide, c->data + c->size - 8, 8);
    return wide;
  }
  memcpy(&narrow, c->data + c->size - 4, 4);
  return narrow;
}

static void client_connect(Client *c, const char *path, const char *token) {
  struct sockaddr_un address = {.sun_family = AF_UNIX};
  if (strlen(path) >= sizeof address.sun_path) fail("the path is too long");
  strcpy(address.sun_path, path);
  c->socket = socket(AF_UNIX, SOCK_STREAM, 0);
  if (connect(c->socket, (struct sockaddr *)&address, sizeof address)) fail("nobody listens");
  begin_frame(c, "hello", 3);
  put_string(c, "version");
  put_byte(c, 1);
  put_string(c, "token");
  put_string(c, token);
  send_frame(c);
  receive_frame(c); /* welcome */
}

static int64_t client_begin(Client *c, const float *observation, int count) {
  begin_frame(c, "begin", 2);
  put_observation(c, observation, count);
  send_frame(c);
  receive_frame(c);
  return action_of(c);
}

static int64_t client_step(Client *c, double reward, const float *observation, int count) {
  begin_frame(c, "step", 3);
  put_string(c, "reward");
  put_float(c, reward);
  put_observation(c, observation, count);
  send_frame(c);
  receive_frame(c);
  return action_of(c);
}

static void client_end(Client *c, double reward, const float *observation, int count, int cut) {
  begin_frame(c, "end", 4);
  put_string(c, "reward");
  put_float(c, reward);
  put_observation(c, observation, count);
  put_string(c, "truncated");
  put_byte(c, cut ? 0xc3 : 0xc2);
  send_frame(c);
}

/* ---------------------------------------------------------------------------------------------- */

/* Barto, Sutton and Anderson 1983: x, x', theta, theta'; returns whether the pole has fallen. */
static int cart_pole(float *s, int64_t action) {
  double force = action ? 10 : -10, sine = sin(s[2]), cosine = cos(s[2]);
  double push = (force + 0.05 * s[3] * s[3] * sine) / 1.1;
  double turn = (9.8 * sine - cosine * push) / (0.5 * (4.0 / 3 - 0.1 * cosine * cosine / 1.1));
  double along = push - 0.05 * turn * cosine / 1.1;
  s[0] += 0.02f * s[1], s[1] += (float)(0.02 * along);
  s[2] += 0.02f * s[3], s[3] += (float)(0.02 * turn);
  return fabs(s[0]) > 2.4 || fabs(s[2]) > 0.2095;
}

int main(int argc, char **argv) {
  static Client client;
  if (argc != 4) fail("usage: external_client SOCKET TOKEN EPISODES");
  client_connect(&client, argv[1], argv[2]);
  long episodes = atol(argv[3]), steps = 0;
  for (long episode = 0; episode < episodes; episode++) {
    float state[4];
    for (int i = 0; i < 4; i++) state[i] = 0.1f * (float)rand() / (float)RAND_MAX - 0.05f;
    int64_t action = client_begin(&client, state, 4);
    for (int step = 1;; step++, steps++) {
      int fallen = cart_pole(state, action), cut = !fallen && step == 500;
      if (fallen || cut) {
        client_end(&client, 1, state, 4, cut);
        steps++;
        break;
      }
      action = client_step(&client, 1, state, 4);
    }
  }
  printf("mean return %.1f\n", episodes ? (double)steps / (double)episodes : 0.0);
  return 0;
}
