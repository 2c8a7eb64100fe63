{{/* The labels of a role's pods: (list . "ps"). */}}
{{- define "dflow.labels" -}}
app.kubernetes.io/name: dflow
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* What all pods have: the user, and the secret in a file that it alone may read, in memory. */}}
{{- define "dflow.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: {{ .Values.runAsUser }}
  runAsGroup: {{ .Values.runAsUser }}
  fsGroup: {{ .Values.runAsUser }}
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: mounted
    secret: {secretName: {{ .Values.secretName }}}
  - name: secret
    emptyDir: {medium: Memory, sizeLimit: 1Mi}
initContainers:
  # A mounted Secret is readable by the group of the pod, which dflow refuses.
  - name: secret
    image: {{ .Values.image }}
    command: [install, -m, "600", /mounted/cluster.secret, /secret/cluster.secret]
    volumeMounts:
      - {name: mounted, mountPath: /mounted, readOnly: true}
      - {name: secret, mountPath: /secret}
    resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
    securityContext: {allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}
{{- end }}

{{/* The address of the coordinator. */}}
{{- define "dflow.coordinator" -}}
{{ .Release.Name }}-coordinator-0.{{ .Release.Name }}:7711
{{- end }}

{{- define "dflow.volume" -}}
accessModes: [ReadWriteOnce]
{{- with (index . 0).Values.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ index . 1 }}}}
{{- end }}
